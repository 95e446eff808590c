// llama.cpp by node-llama-cpp: loads the model, then answers every line of standard input.
import {readFileSync} from "node:fs";
import {resolve} from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

// The package of the current folder, not of the folder that this file is in.
const folder = resolve("node_modules/node-llama-cpp");
const {version, main} = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
const {getLlama} = await import(pathToFileURL(resolve(folder, main)));

const settings = JSON.parse(process.argv.at(-1));
const llama = await getLlama({gpu: false, build: "never", maxThreads: settings.threads, logger: () => {}});
const model = await llama.loadModel({modelPath: settings.model});
const context = await model.createContext({
    contextSize: settings.context,
    sequences: settings.batch,
    batchSize: 512,
    threads: {ideal: settings.threads, min: settings.threads}
});
const sequences = Array.from({length: settings.batch}, () => context.getSequence());

async function one(sequence, prompt, numTokens, start) {
    const times = [];
    for await (const _ of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        times.push((performance.now() - start) / 1000);
        if (times.length >= numTokens) break;
    }
    await sequence.clearHistory();
    return times;
}

const features = llama.systemInfo.match(/\w+ = 1/g).map((text) => text.split(" ")[0]).join(" ");
console.log(JSON.stringify({version: `node-llama-cpp ${version} (${features})`}));
for await (const line of createInterface({input: process.stdin})) {
    const {prompts, num_tokens: numTokens} = JSON.parse(line);
    const start = performance.now();
    const plays = prompts.map((prompt, index) => one(sequences[index], prompt, numTokens, start));
    console.log(JSON.stringify({token_s: await Promise.all(plays)}));
}
process.exit(0);
